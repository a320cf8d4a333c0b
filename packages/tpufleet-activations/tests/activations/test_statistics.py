"""Statistics of stored activations, and the export for Hugging Face."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.activations import synthetic
from tests.activations.tiny_model import tpu
from tpufleet.runtime.units import Units
from tpufleet_activations import plans
from tpufleet_activations.io import datasets, dtypes, parquet_export, unit_writer
from tpufleet_activations.io.storage import LocalFolder

BF16 = dtypes.stored_dtype("bf16")


@pytest.fixture
def folder(tmp_path):
    return LocalFolder(tmp_path / "set")


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_statistics_of_every_stored_type_are_those_of_the_rows(folder, dtype, compression):
    synthetic.extract(folder, synthetic.plan(samples=11, dtype=dtype, compression=compression))
    dataset = datasets.Dataset(folder)
    for site in dataset.sites:
        found = datasets.site_statistics(dataset, site)
        rows = np.concatenate([dataset.read(sample, site) for sample in dataset]).astype("f8")
        assert (found.rows, found.nonfinite) == (len(rows), 0)
        assert found.mean == pytest.approx(rows.mean(), rel=1e-5, abs=1e-5)
        assert found.norm == pytest.approx(np.linalg.norm(rows, axis=1).mean(), rel=1e-5)
        assert found.max == pytest.approx(np.abs(rows).max())
        np.testing.assert_allclose(found.center, rows.mean(axis=0), rtol=1e-4, atol=1e-4)


def test_statistics_of_a_large_dataset_are_those_of_rows_spread_over_it(folder):
    synthetic.extract(folder, synthetic.plan(samples=200))
    dataset = datasets.Dataset(folder)
    exact = datasets.site_statistics(dataset, "resid_post.0", most=None)
    some = datasets.site_statistics(dataset, "resid_post.0", most=exact.rows // 3)
    assert exact.rows / 5 < some.rows < exact.rows / 2
    assert some.norm == pytest.approx(exact.norm, rel=0.5)
    assert exact.rows == dataset.total_rows


def store_rows(folder: LocalFolder, rows: np.ndarray) -> None:
    """A dataset of one sample and one site."""
    site = "resid_post.0"
    plan = synthetic.plan(samples=1, sites=(site,), widths={site: rows.shape[1]})
    plans.write(folder, plan)
    units = Units(folder, count=1, worker="a")
    claim = units.claim()
    numbers = np.arange(len(rows), dtype=np.int32)
    sample = unit_writer.StoredSample(sample=0, tokens=numbers, positions=numbers, metadata={})
    writer = unit_writer.UnitWriter(folder, plan, claim, [sample])
    writer.append(site, rows)
    units.commit(claim, unit_writer.commit_outcome(plan, 0, writer.finish()))


def test_values_that_are_not_finite_are_counted_and_left_out(folder):
    rows = np.ones((6, 4), np.float32)
    rows[1, 2], rows[4, 0], rows[4, 1] = np.inf, np.nan, -np.inf
    rows[5] = -3
    store_rows(folder, rows.astype(BF16))
    found = datasets.site_statistics(datasets.Dataset(folder), "resid_post.0")
    assert (found.rows, found.nonfinite) == (6, 3)
    assert (found.max, found.mean) == (3.0, 0.0)
    assert found.center.tolist() == [0.0] * 4
    assert found.norm == pytest.approx((3 * 2 + 6) / 4)


def test_statistics_of_no_rows_are_unknown(folder):
    plans.write(folder, synthetic.plan())
    assert tpu("stats", folder.path)[1].splitlines()[1].split()[2:5] == ["-", "-", "-"]
    found = json.loads(tpu("stats", folder.path, "--json")[1])["resid_post.0"]
    assert found == {
        "rows": 0, "mean": None, "norm": None, "max": None, "nonfinite": 0
    }  # fmt: skip


def test_stats_are_printed(folder):
    synthetic.extract(folder, synthetic.plan(samples=11))
    code, printed = tpu("stats", folder.path)
    assert code == 0
    assert printed.splitlines()[0].split() == ["SITE", "ROWS", "MEAN", "NORM", "MAX", "NON-FINITE"]
    rows = sum(synthetic.length(sample) for sample in range(11))
    assert printed.splitlines()[1].split()[:2] == ["resid_post.0", str(rows)]
    found = json.loads(tpu("stats", folder.path, "--json")[1])
    assert found["resid_post.3"]["rows"] == rows and found["resid_post.3"]["nonfinite"] == 0


def exported_rows(target: LocalFolder) -> list[dict]:
    import pyarrow.parquet as pq

    tables = [pq.read_table(target.path / name) for name in target.names("data/")]
    return [row for table in tables for row in table.to_pylist()]


def test_an_export_has_every_row_with_its_labels(folder, tmp_path):
    synthetic.extract(folder, synthetic.plan(samples=11))
    target = LocalFolder(tmp_path / "hf")
    dataset = datasets.Dataset(folder)
    summary = parquet_export.export_parquet(dataset, target, file_bytes=2_000)
    assert summary["files"] == len(target.names("data/")) > 2
    rows = exported_rows(target)
    assert len(rows) == summary["rows"] == sum(synthetic.length(sample) for sample in range(11))
    for row in rows:
        sample, position = row["sample"], row["position"]
        assert row["id"] == f"synthetic-{sample}"
        assert row["token"] == synthetic.tokens(sample)[position]
        for site in synthetic.SITES:
            assert row[site] == synthetic.values(sample, site)[position].tolist()
    assert not list((tmp_path / "hf").glob(".staging/*/*.parquet"))


def test_hugging_face_datasets_reads_an_export(folder, tmp_path):
    hf = pytest.importorskip("datasets", reason="pip install datasets")
    synthetic.extract(folder, synthetic.plan(samples=5))
    out = tmp_path / "hf"
    code, printed = tpu("export", folder.path, out, "--site", "resid_post")
    assert code == 0 and "load_dataset" in printed
    loaded = hf.load_dataset(str(out), split="train", cache_dir=str(tmp_path / "cache"))
    expected = ["sample", "id", "position", "token", "resid_post.0", "resid_post.3"]
    assert loaded.column_names == expected
    row = loaded[3]
    values = synthetic.values(row["sample"], "resid_post.3")[row["position"]]
    assert row["resid_post.3"] == values.tolist()


def test_an_export_of_a_missing_site_is_refused(folder, tmp_path):
    synthetic.extract(folder, synthetic.plan(samples=4))
    code, printed = tpu("export", folder.path, tmp_path / "hf", "--site", "attn_out")
    assert code == 1 and "stored sites: resid_post.0" in printed
