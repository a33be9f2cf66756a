"""Tables of docs/many_gpus.md."""

from __future__ import annotations

from operator import itemgetter

from scripts.maintenance.tables.markdown import markdown, read, source, table


def distributed() -> str:
    """Training step on several GPUs of one host."""
    names = ("distributed_2xh200", "distributed_4xh200")
    found = [row for name in names for row in read(name)["results"] if row["gpus"] > 1]
    found.sort(key=itemgetter("model", "kind", "gpus", "threshold", "ms"))
    columns = {
        "model": "{name}, `{kind}`",
        "GPUs": "{gpus}",
        "exchange": "{exchange}{wire}",
        "threshold, rows": "{threshold:,}",
        "ms": "{ms:.2f}",
        "samples/s": "{Msamples/s:.1f} M",
        "scaling efficiency": "{scaling:.2f}",
        "communicating or waiting, ms": "{communication_ms:.2f}",
    }
    for r in found:
        r["name"] = r["model"].capitalize()
        r["wire"] = "" if r["wire"] in ("fp32", "-") else f", {r['wire']}"
    return table(columns, found, *names)


def pages() -> str:
    """Reading rows of host memory and of another GPU by address."""
    name = "pages_2xh200"
    found = read(name)
    link, peers = found["link"], found["peers"]
    near, *_, far, sorted_ = found["host"]
    to, copy = "to_gpu", peers["copy_from_peer"]
    lines = [
        ["pinned host memory", near["gather"], link[to], near["index_select_and_copy"]],
        ["... 4 GB of it", far["gather"], link[to], far["index_select_and_copy"]],
        ["... in ascending order", sorted_["gather"], link[to], sorted_["index_select_and_copy"]],
        ["another GPU", peers["all_on_peer"], copy, "-"],
        ["half on each GPU", peers["half_on_peer"], "-", peers["half_on_peer_portable"]],
        ["this GPU", peers["all_local"], "-", "-"],
    ]
    head = ["131,072 rows of 512 bytes", "by address, GB/s", "plain copy", "without addresses"]
    return markdown(head, lines) + source(name)


def offload() -> str:
    """Training step with tables in host memory and a cache of rows on the GPU."""
    columns = {
        "model": "{model}, {host_bytes:,.0f} MB",
        "optimizer": "{rule}",
        "batch": "{batch:,}",
        "ms": "{ms:.2f}",
        "samples/s": "{Msamples/s:.1f} M",
        "speed relative to dense": "{share}",
        "hit rate": "{hit_rate:.2f}",
        "MB in each direction": "{MB_in:.1f}",
        "share of the link": "{link_share:.0%}",
    }
    rows = [r for r in read("offload_h100")["results"] if r["variant"] == "offload"]
    for r in rows:
        r["share"] = f"{r['speed of dense']:.2f}" if "speed of dense" in r else "-"
    return table(columns, rows, "offload_h100")


TABLES = (distributed, pages, offload)
