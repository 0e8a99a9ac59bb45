"""The Triton kernels of decoding on vLLM's blocks, as on a GPU; here in Triton's interpreter."""

import pytest
from tiny_models import tiny_model


pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-serving")

from vllm_engines import engine, greedy, greedy_of_generate, prompts_of

from dcformer.vllm import backend


def test_keys_and_values_are_read_where_they_lie(tmp_path, monkeypatch):
    calls = []

    def counted(*arguments, key_lengths, **options):
        calls.append(key_lengths.tolist())
        return decode(*arguments, key_lengths=key_lengths, **options)

    decode = backend.decode_op
    monkeypatch.setattr(backend, "decode_op", counted)
    # On a GPU this asks whether the operator would choose its Triton kernels.
    monkeypatch.setattr(
        backend.ComposedAttentionImpl,
        "_reads_blocks",
        lambda self, query, cache, width, batch: query.shape[2] <= 8 and len(batch.real) == len(batch.tokens),
    )
    model = tiny_model(num_key_value_heads=2, compose_groups=2, compose_rank=1, compose_static=True)
    model.save_pretrained(tmp_path)
    prompts = prompts_of(model.config.vocab_size, lengths=(31, 33))
    with engine(tmp_path, max_num_seqs=4) as llm:
        assert greedy(llm, prompts, 3) == greedy_of_generate(model, prompts, 3)
    assert [32, 34] in [sorted(lengths) for lengths in calls]
