from dlrm.training.report import summary


def test_the_final_table_has_one_line_for_each_group(tmp_path):
    final = {
        "test/auc": 0.75, "test/best_possible_auc": 0.8, "val/auc": 0.7, "val/log_loss": 0.5,
        "embeddings/bytes": 3.23e6, "embeddings/compression": 5.5562,
        "embeddings/optimizer_bytes": 1.2e4, "embeddings/weights_bytes": 3.23e6,
        "speed/samples_per_second": 8156.2, "speed/train_seconds": 14.41,
        "speed/data_wait_share": 0.0184, "memory/process_peak": 7.238e8,
    }  # fmt: skip
    assert summary(final, tmp_path / "runs" / "a").splitlines() == [
        "           test    val  best possible",
        "AUC      0.7500 0.7000         0.8000",
        "log loss        0.5000               ",
        "embeddings         bytes 3.23 MB, compression 5.6x, optimizer bytes 12 kB",
        "speed              samples per second 8,156, train seconds 14.4 s, data wait share 1.8%",
        "memory             process peak 724 MB",
        f"results in {tmp_path}/runs/a; tensorboard --logdir {tmp_path}/runs",
    ]
    assert summary({}, tmp_path) == f"results in {tmp_path}; tensorboard --logdir {tmp_path.parent}"
