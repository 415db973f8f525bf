"""Models by name and by import path, and what is said when there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from lab.models import MODELS, ModelError, build_model, find_model

LARGE = {"resnet50", "convnext-t", "vit", "resnet44"}  # one sample is enough for these
OWN_SIZE = {"digits-cnn", "digits-transformer"}  # test_digits.py
BATCH_NORM = {"cnn-whitened"}  # whose samples mix in training, and which has no other norm


@pytest.mark.parametrize("name", sorted(set(MODELS) - OWN_SIZE))
def test_logits_come_from_one_linear_head(name: str) -> None:
    model = build_model(name, classes=7, image_size=32).eval()
    outputs: list[Tensor] = []
    head = model.get_submodule("head")
    assert isinstance(head, nn.Linear)
    head.register_forward_hook(lambda *args: outputs.append(args[2]))
    with torch.no_grad():
        logits = model(torch.randn(1 if name in LARGE else 3, 3, 32, 32))
    assert logits.shape[1] == 7
    scale = getattr(model, "scale", 1)  # of the logits, after the head
    torch.testing.assert_close(logits, scale * outputs[0])
    assert logits is outputs[0] or scale != 1


@pytest.mark.parametrize("name", sorted(set(MODELS) - LARGE - OWN_SIZE - BATCH_NORM))
def test_samples_do_not_mix(name: str) -> None:
    """In training too: without that, no gradient is a sample's own."""
    model = build_model(name, classes=10, image_size=32, seed=0)
    images = torch.randn(3, 3, 32, 32)
    # Float32; batches of different size may add up in another order.
    torch.testing.assert_close(model(images)[:1], model(images[:1]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["cnn-small", "vit-micro", "resnet20", "vit-small"])
def test_per_sample_gradients_by_vmap(name: str) -> None:
    """Quick ones: a warning of a slow path would be an error."""
    # In float64: where a ReLU's input is 0 up to rounding, the two ways take different sides.
    model = build_model(name, classes=10, image_size=32, seed=0).double()
    parameters = {key: value.detach() for key, value in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (image[None],)), label[None])

    rng = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 32, 32, generator=rng, dtype=torch.float64)
    labels = torch.tensor([1, 2])
    each = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, images, labels)
    F.cross_entropy(model(images), labels).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(each[key].mean(dim=0), parameter.grad, rtol=1e-8, atol=1e-10)


def test_a_seed_decides_the_first_parameters_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, second = (build_model("cnn-small", 10, 32, seed=1) for _ in range(2))
    other = build_model("cnn-small", 10, 32, seed=2)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first.get_parameter("head.weight"), second.get_parameter("head.weight"))
    assert not torch.equal(first.get_parameter("head.weight"), other.get_parameter("head.weight"))


@pytest.mark.parametrize(
    ("name", "norm", "kind"),
    [
        ("resnet20", None, nn.GroupNorm),
        ("resnet20", "batch", nn.BatchNorm2d),
        ("resnet50", None, nn.BatchNorm2d),
        ("resnet50", "group", nn.GroupNorm),
        ("cnn-small", "batch", nn.BatchNorm2d),
    ],
)
def test_norms(name: str, norm: str | None, kind: type[nn.Module]) -> None:
    model = build_model(name, 10, 32, norm=norm)  # type: ignore[arg-type]
    norms = {type(m) for m in model.modules() if isinstance(m, nn.GroupNorm | nn.BatchNorm2d)}
    assert norms == {kind}


def test_the_stem_of_resnet50_follows_the_image() -> None:
    def kernel(size: int) -> int:
        model = build_model("resnet50", 10, size)
        return int(next(m for m in model.modules() if isinstance(m, nn.Conv2d)).kernel_size[0])

    assert (kernel(32), kernel(64), kernel(224)) == (3, 7, 7)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet21", {}, "unknown model 'resnet21'; choose from cnn-small"),
        ("vit", {"norm": "batch"}, "vit has no 'batch' norm"),
        ("resnet20", {"norm": "layer"}, "use group or batch"),
        ("vit", {"image_size": 30}, "vit: image_size must be a multiple of 8"),
        ("convnext-t", {"image_size": 31}, "convnext-t: image_size must be >= 32, got 31"),
        ("digits-cnn", {}, "digits-cnn: needs 10 classes and 8 pixels, got 10 and 32"),
    ],
)
def test_bad_names_and_options(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_model(name, **{"classes": 10, "image_size": 32, **options})  # type: ignore[arg-type]


USERS = """
from torch import nn

SIZE = 3

def linear(classes, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size ** 2, classes))

def narrow(classes):
    return nn.Linear(2, classes)

def number(classes, image_size):
    return 5

def wrong(classes, image_size):
    return nn.Linear(classes, "many")
"""


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.joinpath("users_models.py").write_text(USERS)
    tmp_path.joinpath("broken_models.py").write_text("import no_such_package")
    tmp_path.joinpath("unfinished_models.py").write_text("\ndef f(")
    tmp_path.joinpath("dividing_models.py").write_text("\n\n1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "users_models", raising=False)


@pytest.mark.usefixtures("users_module")
def test_a_users_model_from_the_working_directory() -> None:
    path = list(sys.path)
    model = build_model("users_models:linear", classes=4, image_size=8)
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 4)
    assert sys.path == path


@pytest.mark.usefixtures("users_module")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:f", "cannot import 'no_such_module'"),
        ("broken_models:f", "cannot import 'broken_models'.*no_such_package"),
        ("unfinished_models:f", r"SyntaxError: .*\(unfinished_models.py, line 2\)"),
        ("dividing_models:f", r"ZeroDivisionError: .* \(dividing_models.py, line 3\)"),
        (
            "users_models:wrong",
            r"classes=10, image_size=32: TypeError: .*\(users_models.py, line 16",
        ),
        ("users_models:missing", "no 'missing'; it has: .*linear"),
        ("users_models:SIZE", "is a int, not a function"),
        ("users_models:narrow", "must accept the keywords classes and image_size"),
        ("users_models:number", "must return a torch.nn.Module, got int"),
        (":f", "has the form package.module:factory"),
        ("users_models:", "has the form package.module:factory"),
    ],
)
def test_import_paths_that_do_not_work(path: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_model(path, 10, 32)


@pytest.mark.usefixtures("users_module")
def test_what_is_wrong_is_known_before_classes_and_size() -> None:
    assert isinstance(find_model("users_models:linear")(4, 8), nn.Sequential)
    for path in ("resnet21", "unfinished_models:f", "users_models:missing"):
        with pytest.raises(ModelError):
            find_model(path)


@pytest.mark.usefixtures("users_module")
def test_norm_is_not_for_import_paths() -> None:
    with pytest.raises(ModelError, match="norm='batch' only works with built-in models"):
        build_model("users_models:linear", 10, 32, norm="batch")
