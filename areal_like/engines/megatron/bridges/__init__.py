"""Between Hugging Face folders and Megatron-Core models: one protocol (`base.py`), one module a library."""
