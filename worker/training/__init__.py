"""The trainer: the only processes that import torch."""
