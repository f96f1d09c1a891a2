"""The optimizers: AdamW, AdamW with states of one byte, Adafactor. Read optimizer first, then adamw."""
