"""One attempt on several GPUs: data parallelism, with whole or sharded weights (docs/gpus.md, ADR 17 and 20)."""
