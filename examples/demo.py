"""Load the bundled model, ask it questions, and measure it against its baseline without composition.

python examples/demo.py                                   # under a minute on two CPU cores
python examples/demo.py --data-dir DIR                    # measures on the authors' texts as well
python examples/demo.py FOLDER "Once upon a time" ...     # a model folder and prompts of your own
"""

import argparse
import sys
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, pipeline
from transformers.utils import logging

import dcformer
from dcformer.common.terminal import one_line_errors
from dcformer.head_tasks import generate_documents
from dcformer.head_tasks.comparison import BUNDLED_MODEL, compare_models
from dcformer.head_tasks.report import SET_TITLES, write_comparison


QUESTIONS = {"task2": 1, "task16": 1, "task57": 1, "task32": 3, "task46": 3, "task73": 4}  # kind -> lines
QUESTIONS_SEED = 0
DOCUMENTS = 225  # three of each kind
NEW_TOKENS = 40


def ask_questions() -> list[tuple[str, str]]:
    """Questions that were kept from training: (text up to the last answer, that answer)."""
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
    print(
        f"Loaded {Path(folder).name}: {type(model).__name__}, {model.num_parameters():,} parameters, {seconds:.1f} s."
    )
    return pipeline("text-generation", model=model, tokenizer=tokenizer)


def generate(generator, prompts: list[str]) -> list[str]:
    """What the model writes after each prompt; all prompts go through it in one left-padded batch."""
    started = time.perf_counter()
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_full_text": False}
    answers = generator(prompts, batch_size=len(prompts), **options)
    print(f"Answered {len(prompts)} prompts in one batch, {time.perf_counter() - started:.1f} s:")
    return [answer["generated_text"] for (answer,) in answers]


def stream(generator, prompt: str) -> None:
    """Write the answer to one prompt while it is generated."""
    print("\nThe first prompt again, streamed:")
    streamer = TextStreamer(generator.tokenizer, skip_special_tokens=True)
    generator(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, streamer=streamer)


def compare(data_dir: str | None) -> None:
    """Score the bundled model and its baseline on the same documents, and end with the three lines that matter."""
    started = time.perf_counter()
    options = {"documents": DOCUMENTS, "most_authors": DOCUMENTS, "data_dir": data_dir}
    comparison = compare_models(with_authors=data_dir is not None, **options)
    files = write_comparison(comparison, "results/demo")
    print(f"Scored both models on the same documents, {time.perf_counter() - started:.1f} s. What to look at:\n")
    for model, what in zip(reversed(comparison.models), ("heads composed", "plain attention")):
        found = [
            f"{100 * summary['accuracy']:.1f} % of {summary['answers']:,} answers right ({SET_TITLES[name]})"
            for name, summary in model.summaries.items()
        ]
        print(f"{f'{model.label} ({what}):':<36}{', '.join(found)}")
    print(f"Guessing among the three facts: 33.3 %. Every pattern: {'; '.join(files).removeprefix('Results: ')}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask the bundled model questions and measure it against its baseline.")
    parser.add_argument("folder", nargs="?", help="Folder of another model to generate with; nothing is measured then.")
    parser.add_argument("prompts", nargs="*", help="Prompts to use in place of the questions.")
    parser.add_argument(
        "--data-dir", help="Folder that holds synthetic/synthetic_dataset.jsonl, the authors' texts, to measure on too."
    )
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    if arguments.folder is not None and not Path(arguments.folder).is_dir():
        sys.exit(f"There is no model folder {arguments.folder!r}; give the path of a downloaded checkpoint.")
    with one_line_errors(debug=False):
        generator = load(arguments.folder or dcformer.pretrained_path(BUNDLED_MODEL))
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
