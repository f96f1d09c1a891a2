"""Which weights of a model are trained: all of them, or adapters beside them (LoRA).

    method ──asked by──▶ network (inject), optimizers (what requires gradients), checkpoints (weights), planning (FLOPs)
      full    every weight; checkpoints and result are the whole model
      lora    targets ─▶ injection ─▶ guards;  weights, adapter_config.json and the hash of what is not trained

Read method first, then lora.
"""
