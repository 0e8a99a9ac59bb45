"""vLLM's environment, set before vLLM is imported: a small cache, quiet, and the engine in the test's process."""

import os


os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Tests run in parallel, and all would be bound to the same cores.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
