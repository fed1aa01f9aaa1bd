"""Pluggable engines behind two protocols (`base.py`); a backend's descriptor names its engine's import path."""
