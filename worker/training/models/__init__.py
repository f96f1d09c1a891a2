"""Models as files: what *check* looks at, and what *prepare* fetches or converts. Nothing is trained here.

Read headers and model_files (a folder, looked at), hub (where one comes from), then model_store.
"""
