import pytest

from dlrm.data.schema import Split
from dlrm.model import DLRM
from dlrm.training.report import opening, summary


def test_the_final_table_has_one_line_for_each_group(tmp_path):
    final = {
        "test/auc": 0.75, "test/best_possible_auc": 0.8, "val/auc": 0.7, "val/log_loss": 0.5,
        "embeddings/bytes": 3.23e6, "embeddings/compression": 5.5562,
        "embeddings/optimizer_bytes": 1.2e4, "embeddings/weights_bytes": 3.23e6,
        "speed/samples_per_second": 8156.2, "speed/train_seconds": 14.41,
        "speed/data_wait_share": 0.0184, "seconds/total": 20.3, "seconds/start": 5.4,
        "seconds/data_wait": 0.26, "memory/process_peak": 7.238e8,
    }  # fmt: skip
    assert summary(final, tmp_path / "runs" / "a").splitlines() == [
        "           test    val  best possible",
        "AUC      0.7500 0.7000         0.8000",
        "log loss        0.5000               ",
        "embeddings         bytes 3.23 MB, compression 5.6x, optimizer bytes 12 kB",
        "speed              samples per second 8,156, train seconds 14.4 s, data wait share 1.8%",
        "seconds            total 20.3 s, start 5.4 s, data wait 0.3 s",
        "memory             process peak 724 MB",
        f"results in {tmp_path}/runs/a; tensorboard --logdir {tmp_path}/runs",
    ]
    assert summary({}, tmp_path) == f"results in {tmp_path}; tensorboard --logdir {tmp_path.parent}"


@pytest.mark.parametrize(("auc", "best", "told"), [(0.9995, None, 1), (0.99, None, 0), (1, 1, 0)])
def test_an_auc_that_is_too_good_is_doubted(auc, best, told, tmp_path):
    known = {} if best is None else {"test/best_possible_auc": best}
    text = summary({"test/auc": auc, **known}, tmp_path)
    assert text.count("was a column made from the label, or known only after it?") == told


def test_equal_labels_of_a_split_are_pointed_out():
    def split(rows, positives):
        return Split(files=(), rows=rows, positives=positives)

    sizes = {"embeddings/bytes": 80, "embeddings/compression": 1, "embeddings/optimizer_bytes": 0}
    model = DLRM(2, [10], 2, [("dense", {})], bottom_mlp=[4], top_mlp=[4])
    splits = {"train": split(9, 3), "val": split(0, 0), "test": split(2, 2)}
    told = opening("dense", model, splits, sizes, 20).splitlines()
    assert told[0].startswith("dense on cpu: 9 training rows")
    assert told[1:] == [
        "warning: all test rows have the label 1: they have no AUC; give test more rows"
    ]
    note = "note: that is 1 step, too few to learn much: raise --epochs, or lower --batch_size"
    assert opening("dense", model, splits, sizes, 1).splitlines() == [*told, note]
    assert ", embeddings 80 B (1.0x), their" in told[0]
    cached = opening("offload", model, splits, sizes | {"embeddings/cache_bytes": 30}, 20)
    assert ", embeddings 80 B (1.0x, with a cache of 30 B), their" in cached

    # The MLPs have 43 weights, the dense tables 40 or 80 bytes.
    small = sizes | {"embeddings/bytes": 20, "embeddings/compression": 2.0}
    note = "note: dense tables would take 40 B, next to MLPs of 172 B: "
    assert opening("tt", model, splits, small, 20).splitlines()[1].startswith(note)
    larger = small | {"embeddings/compression": 4.0}
    assert "would take" not in opening("tt", model, splits, larger, 20)
