"""Drafts: documents under JSON Schemas with and without them, beside transformers and llama.cpp."""
