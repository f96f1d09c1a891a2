"""Models as files: what *check* looks at, and what *prepare* fetches, makes or converts. Nothing is trained here.

Read headers, layout and model_files (a folder, looked at), hub and builtin (where one comes from), then model_store.
"""
