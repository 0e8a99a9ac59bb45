"""OpenAI's API for a model: the server of vLLM or of Transformers as a process that is watched until it ends."""

from .engines import Choice, choose_engine
from .models import ServedModel, find_served_model
from .process import check_address, run_server
from .request import base_url, curl_line


__all__ = [
    "Choice",
    "ServedModel",
    "base_url",
    "check_address",
    "choose_engine",
    "curl_line",
    "find_served_model",
    "run_server",
]
