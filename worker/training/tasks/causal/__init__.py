"""Causal language models: chats, prompts with completions, plain text."""
