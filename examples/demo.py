"""Load the bundled model, ask it questions, and measure it against its baseline without composition.

python examples/demo.py                                   # under a minute on two CPU cores
python examples/demo.py FOLDER "Once upon a time" ...     # a model folder and prompts of your own
"""

import argparse
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, pipeline
from transformers.utils import logging

import dcformer
from dcformer.eval import evaluate
from dcformer.head_tasks import generate_documents


QUESTIONS = {"task2": 1, "task16": 1, "task57": 1, "task32": 3, "task46": 3, "task73": 4}  # kind -> lines
DOCUMENTS = 225  # three of each kind
OPTIONS = {"max_new_tokens": 40, "do_sample": False}


def held_out_questions() -> list[tuple[str, str]]:
    """Questions that were kept from training: (text up to the last answer, that answer)."""
    questions = []
    for kind, lines in QUESTIONS.items():
        (document,) = generate_documents(1, 0, "test", (lines, lines), (kind,))
        start, end = document["answers"][-1]
        questions.append((document["text"][:start].lstrip(), document["text"][start:end].strip()))
    return questions


def compare() -> None:
    """Score the bundled model and its baseline on the same documents."""
    started = time.perf_counter()
    records = evaluate(tasks="head_tasks", limit=DOCUMENTS, output="results/demo")
    print(f"\nScored both models on the same {DOCUMENTS} documents, {time.perf_counter() - started:.1f} s:\n")
    for record in records:
        accuracy = record.metrics["acc"]["value"]
        print(f"{record.model + ':':<18}{100 * accuracy:.1f} % of answers right")
    print("Guessing among the three facts: 33.3 %. Every pattern: dcformer report results/demo")


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask the bundled model questions and measure it against its baseline.")
    parser.add_argument("folder", nargs="?", help="Folder of another model to generate with; nothing is measured then.")
    parser.add_argument("prompts", nargs="*", help="Prompts to use in place of the questions.")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    folder = arguments.folder or dcformer.pretrained_path("dcformer-tiny")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    print(f"Loaded {Path(folder).name}: {type(model).__name__}, {model.num_parameters():,} parameters.")
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)

    questions = [(prompt, None) for prompt in arguments.prompts] or held_out_questions()
    prompts = [prompt for prompt, _ in questions]
    answers = generator(prompts, batch_size=len(prompts), return_full_text=False, **OPTIONS)
    for (prompt, right), (answer,) in zip(questions, answers):
        note = "" if right is None else f"   (right: {right})"
        print(f"\n{prompt}\n  -> {answer['generated_text'].strip()}{note}")
    print("\nThe first prompt again, streamed:")
    generator(prompts[0], streamer=TextStreamer(tokenizer, skip_special_tokens=True), **OPTIONS)
    if arguments.folder is None:
        compare()


if __name__ == "__main__":
    main()
