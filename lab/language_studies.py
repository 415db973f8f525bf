"""The studies of docs/language.md: small GPTs on the King James Bible, by characters and by words.

The text is not in the repository; --data-dir is a folder with kjv.txt:

    apt-get install bible-kjv
    bible -f 'Gen1:1-Rev22:21' > DIR/kjv.txt
"""

from __future__ import annotations

from lab.study import Study

KJV = "--task language --data kjv --test-size 32768"
CHARS = f"{KJV} --tokens char --steps 300"
WORDS = f"{KJV} --tokens word --length 32 --batch-size 16 --steps 400 --vocabulary"
# As Transformers' run_clm.py trains: a straight line down, no warm-up, no weight decay.
TRAINER = "--schedule linear --warmup-steps 0 --weight-decay 0 --beta2 0.999"
CHAR_LR, WORD_LR, GPT2_LR = "--lr 0.016", "--lr 0.004", "--lr 0.004"  # the best of both arms


def _study(name: str, question: str, words: str, seeds: int) -> Study:
    return Study(f"language-{name}", question, words, seeds, page="language", radius=0.1)


LANGUAGE = (
    _study(
        "rates-char",
        "Characters: best against best over learning rates",
        f"{CHARS} --lr 0.002 0.004 0.008 0.016 0.032 0.064 --arms base primum",
        2,
    ),
    _study(
        "rates-word",
        "Words: best against best over learning rates",
        f"{WORDS} 1000 --lr 0.004 0.008 0.002 --arms base primum",
        2,
    ),
    _study(
        "char",
        "Characters at the best rate: is it more than a larger step or any weights?",
        f"{CHARS} {CHAR_LR} --arms base primum permuted lr-matched",
        5,
    ),
    _study(
        "gpt2",
        "Transformers' GPT-2, tied and with dropout: does the radius decide?",
        f"{WORDS} 2000 {GPT2_LR} {TRAINER} --model gpt2-nano --arms base primum primum@radius=0.2",
        5,
    ),
    _study(
        "word",
        "Words at the best rate, with the controls",
        f"{WORDS} 1000 {WORD_LR} --arms base primum primum@radius=0.2 permuted lr-matched",
        5,
    ),
    _study(
        "per",
        "Weights for tokens or for whole sequences?",
        f"{CHARS} {CHAR_LR} --arms base primum primum@per=sample primum@per=sample,radius=0.2",
        3,
    ),
    _study(
        "bound",
        "Characters: how large may an extra weight be?",
        f"{CHARS} {CHAR_LR} --arms base primum@max_extra_weight=0.5 primum@max_extra_weight=1 "
        "primum",
        3,
    ),
    _study(
        "sgd",
        "Characters, SGD with momentum: best against best",
        f"{CHARS} --optimizer sgd --lr 0.25 0.5 1 2 4 --arms base primum",
        2,
    ),
    _study(
        "batches",
        "Characters: 16 to 128 sequences, the rate grows with the square root",
        f"{CHARS} --lr-scale 2 --batch-size 16 32 64 128 --arms base primum",
        3,
    ),
    _study(
        "more-controls",
        "Characters: the other controls",
        f"{CHARS} {CHAR_LR} --arms base primum normalised loss-weighted focal time-matched",
        3,
    ),
)
