"""The studies of images: those behind the pages on results, the guide and the tutorial."""

from __future__ import annotations

from functools import partial

from lab.shift_runs import shift_runs
from lab.speedrun import speedrun_runs, study_runs, tuning_runs
from lab.study import Study
from lab.tuned import control_runs, rate_runs, tuned_runs
from lab.tutorial_runs import tiny, tutorial_runs

SMALL = "--radius 0.2 --train-size 5000 --test-size 5000 --evaluate-every 2"
LARGE = "--radius 0.2 --train-size 10000 --test-size 5000 --evaluate-every 4"
RESNET = (
    "--model resnet20 --lr 0.05 --train-size 5000 --test-size 5000 --epochs 8 --evaluate-every 2"
)
STABLE = "--warmup 1 --clip 1"
MAIN = "base paper primum primum@radius=0.4"
CONTROLS = (
    "base paper primum primum@radius=0.1 primum@radius=0.4 permuted normalised lr-matched "
    "time-matched focal loss-weighted"
)
RATES = "--lr-scale 0.25 0.5 1 2 4"
IMAGES = (
    Study(
        "speedrun-tuning",
        "Which learning rate and weight decay suit plain training best, at each budget?",
        own_runs=tuning_runs,
        smoke_runs=partial(tuning_runs, "smoke"),
    ),
    Study(
        "speedrun",
        "A strong recipe: what is gained at which budget?",
        own_runs=study_runs,
        smoke_runs=partial(speedrun_runs, "smoke"),
    ),
    Study(
        "tuned-rates",
        "Which learning rate suits plain training best, on 20,000 images?",
        own_runs=rate_runs,
        smoke_runs=partial(rate_runs, smoke=True),
    ),
    Study(
        "tuned",
        "Longer training of the small networks at base's best learning rate: what is gained?",
        own_runs=tuned_runs,
        smoke_runs=partial(tuned_runs, smoke=True),
    ),
    Study(
        "controls-sgd",
        "Is it better than plain training, and is it more than a larger step, more time or "
        "emphasis on hard samples? SGD",
        f"{SMALL} --optimizer sgd --arms {CONTROLS}",
        10,
    ),
    Study(
        "controls-adamw",
        "The same with AdamW",
        f"{SMALL} --optimizer adamw --arms {CONTROLS}",
        10,
    ),
    Study(
        "rates-sgd",
        "Best against best: learning rates from a quarter to four times, SGD",
        f"{SMALL} --optimizer sgd {RATES} --arms {MAIN}",
    ),
    Study(
        "radius",
        "How large should the radius be?",
        f"{SMALL} --optimizer sgd adamw --arms base primum@radius=0.1 primum primum@radius=0.4 "
        "primum@radius=0.8",
        10,
    ),
    Study(
        "cifar100",
        "A hundred classes",
        f"{SMALL} --data cifar100 --optimizer sgd adamw --arms {MAIN}",
        5,
    ),
    Study(
        "noise",
        "Wrong labels: does it hurt to emphasise samples that are harmed?",
        f"{SMALL} --optimizer sgd --label-noise 0 0.1 0.4 --arms base paper primum "
        "primum@radius=0.4",
        5,
    ),
    Study(
        "batches-sgd",
        "Large batches, up to where the paper fails: SGD",
        f"{LARGE} --optimizer sgd --batch-size 512 1024 --arms {MAIN}",
        10,
    ),
    Study(
        "batches-adamw",
        "Large batches, AdamW",
        f"{LARGE} --optimizer adamw --batch-size 512 --arms base paper primum",
    ),
    Study(
        "vit",
        "A small transformer",
        f"{SMALL} --model vit-micro --optimizer adamw --arms {MAIN}",
        5,
    ),
    Study(
        "resnet",
        "A ResNet-20",
        "--radius 0.2 --model resnet20 --train-size 5000 --test-size 2000 --epochs 8 "
        "--arms base paper primum",
    ),
    Study(
        "resnet-controls",
        "Where the gain is largest: is it a larger step, or a damped common shift of the logits?",
        f"{RESNET} --arms base primum@radius=0.4 damped lr-matched@radius=0.4 permuted@radius=0.4",
    ),
    Study(
        "resnet-stabilised",
        "The same network with a warm-up and clipped gradients: what is left of the gain?",
        f"{RESNET} {STABLE} --arms base primum@radius=0.4",
    ),
    Study(
        "cnn-stabilised",
        "The small CNN with a warm-up and clipped gradients: what is left of the gain?",
        f"{SMALL} {STABLE} --arms base primum@radius=0.4",
        5,
    ),
    Study(
        "batch-norm",
        "The small CNN with batch norm instead of group norm: what is left of the gain?",
        f"{SMALL} --norm batch --optimizer sgd adamw --arms base primum@radius=0.4 damped",
        10,
    ),
    Study(
        "batch-norm-controls",
        "ResNet-20 with batch norm: what explains its gain?",
        own_runs=control_runs,
        smoke_runs=partial(control_runs, smoke=True),
    ),
    Study(
        "common-shift",
        "When does it pay? How much of a plain step moves the logits of all samples alike",
        own_runs=shift_runs,
        smoke_runs=partial(shift_runs, smoke=True),
    ),
    Study(
        "rates-adamw",
        "Best against best, AdamW",
        f"{SMALL} --optimizer adamw {RATES} 8 16 --arms base paper primum",
    ),
    Study(
        "upgrad",
        "The nearest published alternative, in batches of 32",
        f"{SMALL} --batch-size 32 --optimizer sgd adamw --arms base primum upgrad "
        "upgrad@upgrad_scale=mean-1",
    ),
    Study(
        "tutorial",
        "What does a step do to its samples?",
        own_runs=tutorial_runs,
        smoke_runs=lambda: [tiny(run) for run in tutorial_runs()[14:17]],
        page="tutorial",
    ),
)
