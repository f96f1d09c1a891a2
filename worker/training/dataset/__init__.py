"""The prepared dataset: usable rows as tokens in flat files, made once by one process a core, with a report on them.

Read words, tokens, encoding and pool (texts to tokens), then split, assembly, ledger and data (tokens to files).
`writing` puts them together.
"""
