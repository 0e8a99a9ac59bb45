"""Scoring with lm-evaluation-harness: any causal language model of Transformers, ours above all.

Importing this module registers the class under the name "dcformer". It differs from the harness's own `HFLM` in three
points: logits are computed, and their log-softmax taken in float32, only at the positions whose next token is scored;
what several inputs begin with is computed once; and a token id without an embedding row is handled by a named policy
instead of reading past the end of the table.
`stock_language_model` is the harness's own class, to compare with.
"""

import contextlib
import functools
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch


try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise ImportError(f"Evaluation needs {error.name}: pip install 'dcformer[eval]'.") from error

from ..configuration_dcformer import DCFormerConfig
from .devices import choose_device
from .log_likelihoods import LogLikelihoods, check_policy, policy_in_force
from .model_files import check_complete
from .prefix_scoring import CannotShare, PrefixScorer
from .processes import processes_here
from .scoring import ScoredInput, TargetScore, TargetScorer
from .shared_prefixes import shared_stretches


logger = logging.getLogger(__name__)

CPU_BATCH_SIZE = 16
# Arguments by which the harness loads something else than the weights of a folder.
_OTHER_LOADERS = ("peft", "delta", "autogptq", "gptqmodel", "gguf_file")


@register_model("dcformer")
class DCFormerLM(LogLikelihoods, HFLM):
    """
    Args:
        pretrained (`str` or `PreTrainedModel`): Folder, Hub id or a loaded model.
        device (`str`, *optional*): As [`dcformer.eval.devices.choose_device`] takes it; of a loaded model its own.
        batch_size (`int` or `"auto"`, defaults to `"auto"`): Inputs in a forward pass. "auto" is 16 on a CPU and what
            fits on a GPU. A batch whose logits would exceed 1 GiB is cut.
        oov_policy (`str`, *optional*): For a token id without an embedding row. "error" raises; "clamp" takes the last
            row, as JAX does; "pad" adds mean rows and is known to our models only. None: the configuration's own, for
            other models "error".
        on_progress (`Callable`, *optional*): Called with the numbers of requests done and in all; None: a tqdm bar.
        shared_prefixes (`bool`, defaults to `True`): Compute once what several inputs begin with, as the choices of a
            question do, and read it from the model's cache for the rest. A model is tried out first; where it cannot,
            every input is computed whole, and a warning says why.
        kwargs: As `HFLM`.

    Attributes:
        sharing_problem (`str`, *optional*): Why the model computes every input whole although it was to share; None
            if nothing is known against it.

    Raises:
        ValueError: for an unknown policy, or "pad" with a model that cannot; for a device that is not there, or is not
            that of a loaded model; for a folder without the weights of some parameters.
    """

    def __init__(
        self,
        pretrained,
        *,
        device: str | None = None,
        batch_size: int | str = "auto",
        oov_policy: str | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        shared_prefixes: bool = True,
        backend: str = "causal",
        **kwargs,
    ):
        check_policy(oov_policy)
        if isinstance(pretrained, str):
            device = choose_device(device, processes_here())
        else:
            _check_device_of(pretrained, device)
        self.oov_policy = oov_policy
        super().__init__(pretrained, device=device, batch_size=batch_size, backend=backend, **kwargs)
        self.oov_policy = policy_in_force(self.model.config, oov_policy)
        if self.batch_size_per_gpu == "auto" and self.device.type == "cpu":
            self.batch_size_per_gpu = CPU_BATCH_SIZE
        if hasattr(self, "accelerator"):
            # HFLM counts processes only where each of several sees all GPUs of one machine.
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        self._scorer = TargetScorer(self.model, self.softmax_dtype, self.mixed_precision_dtype)
        self.shared_prefixes = shared_prefixes
        self.sharing_problem: str | None = None
        self.embedding_rows = self._scorer.rows
        # Rows that hold an embedding of their own; HFLM's configuration was read before any were added.
        self.trained_rows = min(self.embedding_rows, self.config.get_text_config().vocab_size)
        self.start_counting(on_progress)

    def _create_model(self, pretrained, **kwargs):
        policy = policy_in_force(self.config, self.oov_policy)
        if isinstance(self.config, DCFormerConfig):
            kwargs["oov_policy"] = policy
        if any(kwargs.get(name) for name in _OTHER_LOADERS):
            super()._create_model(pretrained, **kwargs)
            return
        super()._create_model(pretrained, output_loading_info=True, **kwargs)
        self._model, info = self._model
        check_complete(self._model, info, pretrained)

    def get_model_info(self) -> dict:
        if not isinstance(self.pretrained, str) or not Path(self.pretrained).is_dir():
            return super().get_model_info()
        # The harness would ask the Hub for a repository of the folder's name.
        return {"model_num_parameters": self.model.num_parameters(), "model_dtype": self.model.dtype}

    def sharing(self) -> dict[str, Any]:
        shares = self.shared_prefixes and self.sharing_problem is None
        return {"shared_prefixes": shares} | ({"sharing_problem": self.sharing_problem} if self.sharing_problem else {})

    def _score(
        self, inputs: Sequence[ScoredInput], requests: Sequence[tuple], override_bs: int | None
    ) -> Iterator[list[tuple[int, list[TargetScore]]]]:
        sizes = self._batch_sizes(requests, override_bs)
        roots = shared_stretches([each.ids for each in inputs]) if self.shared_prefixes else []
        sharing = self._prefix_scorer if any(root.children for root in roots) else None
        left = dict.fromkeys(range(len(inputs)))
        if sharing is not None:
            before = sharing.saved_tokens
            try:
                for done in sharing.score(inputs, roots, sizes):
                    self.cached_tokens += sharing.saved_tokens - before
                    before = sharing.saved_tokens
                    for place, _ in done:
                        del left[place]
                    yield done
            except CannotShare as error:
                self._prefix_scorer = None
                self._say_why_not(error)
        whole = list(left)
        places = iter(whole)
        for batch in self._scorer.batches([inputs[place] for place in whole], lambda index: sizes(whole[index])):
            yield [(next(places), scores) for scores in self._scorer.score(batch)]

    @functools.cached_property
    def _prefix_scorer(self) -> PrefixScorer | None:
        try:
            return PrefixScorer(self._scorer)
        except CannotShare as error:
            self._say_why_not(error)
            return None

    def _say_why_not(self, error: CannotShare) -> None:
        self.sharing_problem = str(error)
        logger.warning("What inputs begin with alike is computed again for each of them: %s.", error)

    def _batch_sizes(self, longest_first: Sequence[tuple], override_bs: int | None) -> Callable[[int], int]:
        """Number of inputs in the batch that begins with the input of an index."""
        self.batch_sizes = {}

        def size_at(start: int) -> int:
            size = override_bs or self.batch_size
            if size != "auto":
                return size
            # The harness announces on stdout what it tries.
            with contextlib.redirect_stdout(io.StringIO()):
                return self._batch_scheduler(start, longest_first)

        return size_at


def stock_language_model(pretrained: str, *, device: str, batch_size: int | str, **options) -> HFLM:
    """
    The harness's own class for causal models, with its own batches, forward passes and log-softmax.

    Args:
        pretrained (`str`): Folder or Hub id.
        device (`str`): What [`dcformer.eval.devices.choose_device`] has chosen.
        batch_size (`int` or `"auto"`): Inputs in a forward pass.
        options: Further arguments of `HFLM`.
    """
    return HFLM(pretrained, backend="causal", device=device, batch_size=batch_size, **options)


def _check_device_of(model, device: str | None) -> None:
    """That a loaded model is on the device that is asked for, since it stays where it is."""
    if device is None:
        return
    asked, own = torch.device(choose_device(device)), model.device
    if asked.type != own.type or asked.index not in (None, own.index):
        raise ValueError(f"The model is on {str(own)!r}, and device is {str(device)!r}; move it, or leave device out.")
