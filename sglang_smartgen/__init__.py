"""SmartGen for SGLang: decode before the whole KV cache has arrived, with the same answer."""

__version__ = "0.1.0"
