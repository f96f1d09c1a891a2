"""Asking finished models: through the queue of requests, in our shape and in that of OpenAI."""
