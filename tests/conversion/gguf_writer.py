"""GGUF files of small models, as llama.cpp's converter writes them."""

import numpy as np


def write_gguf(path, model, settings=(), tensors=(), without=(), facts=()):
    """
    Write a Llama or Qwen model of Transformers.

    Args:
        settings, facts: Further settings of the architecture, and others, by key.
        tensors: Further tensors, by name.
        without: Parameters and settings to leave out.
    """
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    values = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        **dict(settings),
    }
    add = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, int: writer.add_int32}
    values = {f"{config.model_type}.{key}": value for key, value in values.items() if key not in without}
    for key, value in (values | dict(facts)).items():
        add[type(value)](key, value)
    writer.add_string("general.name", "tiny")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*"ab", "ab", "ba", *(f"token {i}" for i in range(config.vocab_size - 4))])
    writer.add_token_merges(["a b", "b a"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[config.model_type], config.num_hidden_layers)
    for name, values in model.state_dict().items():
        values = values.numpy()
        if config.model_type == "llama" and (".q_proj." in name or ".k_proj." in name):  # pairs of channels alternate
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            halves = values.reshape(heads, 2, -1, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        if name not in without:
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), values)
    for name, values in dict(tensors).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
