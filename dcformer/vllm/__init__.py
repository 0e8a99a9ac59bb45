"""DCFormer and DCPythia in vLLM: a plugin that adds the models and an attention backend that composes heads.

Nothing here is imported by the rest of the package; vLLM finds `registration.register` by its entry point.
"""
