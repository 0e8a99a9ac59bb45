"""A tokenizer for the head tasks, which are about words: one token per word or punctuation mark."""

from functools import cache
from itertools import chain

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from .generator import iterate_documents
from .kinds import TASK_KINDS
from .vocabulary import VOCABULARY, opposites


END_OF_TEXT, PADDING, UNKNOWN = "<|endoftext|>", "<|padding|>", "<|unknown|>"
_PIECES = r"\n|o'clock|D\.C|>\.|'s|[.,?<>']|[^\s.,?<>']+"


def build_tokenizer(model_max_length: int = 512) -> PreTrainedTokenizerFast:
    """
    Build the tokenizer, for inputs of at most `model_max_length` tokens. `<|endoftext|>` begins every text; words that
    the tasks do not use become `<|unknown|>`. Decoded documents are equal to the character.
    """
    vocabulary = {token: index for index, token in enumerate([END_OF_TEXT, PADDING, UNKNOWN, *_words()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = _splitter()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", pair=f"{END_OF_TEXT} $A $B", special_tokens=[(END_OF_TEXT, 0)]
    )
    joined = [decoders.WordPiece(prefix="##", cleanup=False), decoders.Fuse()]  # by spaces; no token has the prefix
    marks = [decoders.Replace(Regex(r" (?=[.,?]|'s)"), ""), decoders.Replace(Regex(" ?\n ?"), "\n")]
    tokenizer.decoder = decoders.Sequence(joined + marks)
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": PADDING, "unk_token": UNKNOWN}
    options = {"model_max_length": model_max_length, "padding_side": "left", "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, **options)


def count_tokens(text: str) -> int:
    """The number of tokens of a text without the one that begins it."""
    return len(_splitter().pre_tokenize_str(text))


@cache
def _splitter() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(_PIECES), behavior="removed", invert=True)


@cache
def _words() -> tuple[str, ...]:
    """All words and marks of the documents, sorted."""
    # The templates have further words; a few documents of every kind contain them all.
    texts = [document["text"] for document in iterate_documents(count=len(TASK_KINDS) * 60, seed=0, lines=(1, 1))]
    texts += [*VOCABULARY["people"], *opposites(), *map(str.capitalize, opposites())]
    for name in ("superclasses", "capabilities", "countries"):
        texts += [*VOCABULARY[name], *chain(*VOCABULARY[name].values())]
    texts += chain(*(ordinal["values"] for ordinal in VOCABULARY["ordinals"].values()))
    return tuple(sorted({piece for text in texts for piece, _ in _splitter().pre_tokenize_str(text)}))
