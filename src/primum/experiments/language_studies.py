"""The studies of docs/language.md: small GPTs on the King James Bible, by characters and by words.

The text is not in the repository; --data-dir is a folder with kjv.txt:

    apt-get install bible-kjv
    bible -f 'Gen1:1-Rev22:21' > DIR/kjv.txt
"""

from __future__ import annotations

from primum.experiments.study import Study

KJV = "--task language --data kjv --test-size 32768"
CHARS = f"{KJV} --tokens char --steps 300"
WORDS = f"{KJV} --tokens word --length 32 --batch-size 16 --steps 400"

LANGUAGE = (
    Study(
        "language-rates-char",
        "Characters: best against best over learning rates",
        f"{CHARS} --lr 0.002 0.004 0.008 0.016 0.032 0.064 --arms base primum",
        2,
        page="language",
    ),
    Study(
        "language-rates-word",
        "Words: best against best over learning rates",
        f"{WORDS} --lr 0.001 0.002 0.004 0.008 0.016 0.032 --arms base primum",
        2,
        page="language",
    ),
)
