"""One attempt on several GPUs: data parallelism (docs/gpus.md, ADR 17)."""
