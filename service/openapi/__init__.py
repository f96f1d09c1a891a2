"""The OpenAPI document: what FastAPI cannot know of the routes."""
