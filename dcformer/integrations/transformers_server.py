"""The server of Transformers (`transformers serve`)."""

from ..modeling_dcformer import DCFormerForCausalLM, DCPythiaForCausalLM


def name_models_for_server() -> None:
    """
    Make the language models attributes of the module `transformers`, in the process of the server alone.

    The server takes the class that `config.json` names from there and asks no Auto class. Nothing else needs it: TRL
    and pipelines then use the Auto class.
    """
    from transformers.cli.serving import model_manager

    for model in (DCFormerForCausalLM, DCPythiaForCausalLM):
        setattr(model_manager.transformers, model.__name__, model)
