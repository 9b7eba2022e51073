"""Programs that our server is compared with: the article's FastAPI servers, and vLLM's environment."""
