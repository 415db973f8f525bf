"""The benchmarks against the paper run at tiny sizes, and their yardsticks are right."""

import io
import json
import sys

import pytest
import torch

from lab.bench import _capture, gram, solvers


def captured(kind: str, batch: int = 24):
    *_, moments = _capture.capture(kind, _capture.digits(), batch, 6, [6], 0)
    return moments[0]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_all_forms_of_the_matrix_agree(optimizer):
    case = gram.Case(optimizer, inputs=12, outputs=4, batch=9)  # four outputs: rank 5 is exact
    given = gram.draw(case)
    exact = gram.head_of(case, given).dense().matrix
    for form in (f"explicit_{optimizer}", f"factorised_{optimizer}"):
        torch.testing.assert_close(getattr(gram, form)(given), exact, rtol=1e-4, atol=1e-4)
    if optimizer == "adamw":
        torch.testing.assert_close(gram.looped_adamw(given), exact, rtol=1e-4, atol=1e-4)


def test_gram_has_all_sizes_of_the_paper():
    assert len(set(gram.PAPER)) == 24
    lost = [str(case) for case in gram.PAPER if case.paper_explicit is None]
    assert lost == ["sgd 2048x1000 B=1024", "sgd 2048x1000 B=4096", "adamw 768x1000 B=4096"]


def test_gram(tmp_path, capsys):
    out = tmp_path / "gram.json"
    cap = 8 * 10 * 6 * 2 * 4 / 2**30  # too small for the second size
    arguments = ["--sizes", "6x4x8", "10x6x40", "--seconds", "0.1", "--repeats", "3"]
    arguments += ["--gain-steps", "2", "--gain-batch", "16", "--cap", str(cap), "--out", str(out)]
    assert gram.main(arguments) == 0
    content = json.loads(out.read_text())
    assert [("explicit" in row["ms"]) for row in content["sizes"]] == [True, False, True, False]
    for row in content["sizes"]:
        assert row["peak_bytes"]["factorised"] >= 4 * row["batch"] ** 2
    assert [row["step"] for row in content["errors"]] == [1, 2, 1, 2]
    assert all(row["q1"] < 1e-10 for row in content["errors"] if row["outputs"] == 4)
    assert str(tmp_path) not in out.read_text()
    assert "out of memory" in capsys.readouterr().out
    assert "out of memory" in out.with_suffix(".md").read_text()


def test_solvers(tmp_path, capsys):
    out = tmp_path / "solvers.json"
    arguments = ["--batches", "16", "--steps", "6", "--problems", "1", "--seconds", "0.01"]
    assert solvers.main([*arguments, "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    assert [len(group["problems"]) for group in content["groups"]] == [1, 1]
    for group in content["groups"]:
        for problem in group["problems"]:
            assert problem["own"]["optimum_gap"] < 1e-6
            assert problem["own"]["optimum"] == pytest.approx(problem["own"]["clarabel"], abs=1e-5)
            for arm in problem["arms"].values():  # nobody beats the optimum
                assert arm["removed_inside"] <= problem["optimum"] + 1e-5
                assert arm["own_improvement"] <= 1 - problem["own"]["optimum"] + 1e-5
            for solver in ("20", "50"):
                gaps = problem["own"][solver]
                assert -1e-6 <= gaps["true"] <= gaps["certified"] + 1e-6
    assert str(tmp_path) not in out.read_text()
    assert str(tmp_path) not in out.with_suffix(".md").read_text()
    for name in ("sgd", "adamw", "figure2"):
        assert (tmp_path / f"solvers-{name}.png").stat().st_size > 10_000
        assert str(tmp_path) not in (tmp_path / f"solvers-{name}.svg").read_text()
    assert "primum, solved exactly" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_products_of_the_papers_solver(kind):
    moment = captured(kind)
    with solvers.Products() as counter:
        answer = solvers.paper_bare(moment, iterations=15, tol=0.0)
    assert answer.iterations == 15
    assert counter.count == answer.products


def test_iterations_to_gap_is_the_smallest_number_that_proves_it():
    moment = captured("sgd", batch=48)
    problem, harm = solvers.own_problem(moment), moment.drift.clamp_min(0).sum()
    gaps = []
    for iterations in range(1, solvers.MOST + 1):
        found = solvers.solve(problem, iterations)
        gaps.append(float((found.objective - found.lower_bound) / harm))
    proven = [number for number, gap in enumerate(gaps, 1) if gap <= solvers.GAP]
    assert solvers.iterations_to_gap(moment) == (proven[0] if proven else None)


def test_slow_solvers_get_few_of_the_large_problems():
    subset = solvers.subset
    assert subset(10, 256) == set(range(10))
    assert subset(10, 512) == {1, 3, 6, 8}
    assert subset(10, 1024) == {2, 7}
    assert subset(1, 1024) == {0}


def test_cifar_without_pyarrow_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    arguments = ["--dataset", "cifar10", "--data-dir", str(tmp_path)]
    with pytest.raises(SystemExit, match="pip install pyarrow pillow"):
        solvers.main(arguments)


def test_cifar_is_read_from_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    image = pytest.importorskip("PIL.Image")
    rows = []
    for shade in (0, 255):
        png = io.BytesIO()
        image.new("RGB", (32, 32), (shade, shade, shade)).save(png, "PNG")
        rows.append({"bytes": png.getvalue(), "path": None})
    folder = tmp_path / "cifar100"
    folder.mkdir()
    table = arrow.table({"img": rows, "fine_label": [7, 99]})
    parquet.write_table(table, folder / "train-00000-of-00001.parquet")
    data = _capture.cifar(tmp_path, "cifar100", most=10)
    assert data.images.shape == (2, 3, 32, 32)
    assert data.images[0].unique().numel() == 1
    assert data.images[0, 0, 0, 0] < 0 < data.images[1, 0, 0, 0]
    assert data.labels.tolist() == [7, 99]
    assert data.classes == 100
