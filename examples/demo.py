"""The main job from end to end, with the trained model in the box: load it, ask it, measure it against its twin.

python examples/demo.py                                   # in under two minutes on two CPU cores
python examples/demo.py --data-dir DIR                    # measures on the authors' texts too
python examples/demo.py FOLDER "Once upon a time" ...     # a folder and prompts of your own
"""

import argparse
import sys
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, pipeline
from transformers.utils import logging

import dcformer
from dcformer.head_tasks import generate_documents
from dcformer.head_tasks.comparison import BOXED_MODEL, compare_models
from dcformer.head_tasks.report import print_comparison, write_comparison
from dcformer.terminal import make_console, one_line_errors


QUESTIONS = {"task2": 1, "task16": 1, "task57": 1, "task32": 3, "task46": 3, "task73": 4}  # kind -> lines
QUESTIONS_SEED = 0
DOCUMENTS = 225  # three of each kind
NEW_TOKENS = 40


def ask_questions() -> list[tuple[str, str]]:
    """(text up to the last answer, that answer) of lines that are kept from training."""
    questions = []
    for kind, lines in QUESTIONS.items():
        document = generate_documents(1, QUESTIONS_SEED, "test", (lines, lines), (kind,))[0]
        start, end = document["answers"][-1]
        questions.append((document["text"][:start].lstrip(), document["text"][start:end].strip()))
    return questions


def load(folder: str):
    """A text-generation pipeline, by the Auto classes."""
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    seconds = time.perf_counter() - started
    print(f"{type(model).__name__}, {model.num_parameters():,} parameters, loaded from {folder} in {seconds:.1f} s.")
    return pipeline("text-generation", model=model, tokenizer=tokenizer)


def generate(generator, prompts: list[str]) -> list[str]:
    """What follows all prompts, from one left-padded batch."""
    started = time.perf_counter()
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_full_text": False}
    answers = generator(prompts, batch_size=len(prompts), **options)
    print(f"\n{len(prompts)} prompts in one batch, {time.perf_counter() - started:.1f} s:")
    return [answer["generated_text"] for (answer,) in answers]


def stream(generator, prompt: str) -> None:
    print("\nThe first again, word by word as it is written:")
    streamer = TextStreamer(generator.tokenizer, skip_special_tokens=True)
    generator(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, streamer=streamer)


def compare(data_dir: str | None) -> None:
    """The model in the box and its twin without composition, on a few hundred documents."""
    started = time.perf_counter()
    options = {"documents": DOCUMENTS, "most_authors": DOCUMENTS, "data_dir": data_dir}
    comparison = compare_models(with_authors=data_dir is not None, **options)
    print(f"\nIts twin has plain attention; both on the same documents in {time.perf_counter() - started:.1f} s:\n")
    print_comparison(comparison, make_console(pipe_width=100), groupings=("by_pattern",))
    print()
    for line in write_comparison(comparison, "results/demo"):
        print(line)
    if data_dir is None:
        print("The authors' 888 texts are left out; --data-dir names a folder that holds them.")


def main() -> None:
    parser = argparse.ArgumentParser(description="Load a model, generate, and compare the model in the box.")
    parser.add_argument("folder", nargs="?", help="Model to generate with instead of the one in the box.")
    parser.add_argument("prompts", nargs="*", help="Prompts of your own.")
    parser.add_argument("--data-dir", help="Folder with synthetic/synthetic_dataset.jsonl, the authors' texts.")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    if arguments.folder is not None and not Path(arguments.folder).is_dir():
        sys.exit(f"There is no model folder {arguments.folder!r}; give the path of a downloaded checkpoint.")
    with one_line_errors(debug=False):
        generator = load(arguments.folder or dcformer.pretrained_path(BOXED_MODEL))
        questions = [(prompt, None) for prompt in arguments.prompts] or ask_questions()
        prompts = [prompt for prompt, _ in questions]
        for (prompt, right), answer in zip(questions, generate(generator, prompts)):
            note = "" if right is None else f"   (right: {right})"
            print(f"\n{prompt}\n  -> {answer.strip()}{note}")
        stream(generator, prompts[0])
        if arguments.folder is None:
            compare(arguments.data_dir)


if __name__ == "__main__":
    main()
