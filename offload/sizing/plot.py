"""The plot of hit rate against memory. Needs matplotlib."""

import io

from offload.sizing.capacity import Sizing


def draw(sizing: Sizing, title: str, share: float) -> bytes:
    """A PNG: hit rate against GiB on a logarithmic scale, and the row with ``share`` of all hits marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    enough, most = sizing.enough(share), sizing.rows[-1]
    figure, axis = pyplot.subplots(figsize=(7, 4.4))
    gib, rates = [row.gib for row in sizing.rows], [100 * row.hit_rate for row in sizing.rows]
    axis.plot(gib, rates, marker="o", color="#2a9d4a")
    axis.axhline(100 * most.hit_rate, color="black", linewidth=0.8, linestyle=":")
    label = f"{enough.gib:,.4g} GiB: {enough.hit_rate:.1%}, at least {share:.0%} of what there is to find"
    axis.axvline(enough.gib, color="black", linewidth=0.8, linestyle="--", label=label)
    axis.legend(loc="lower right", frameon=False)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axis.set_xlabel("GiB of pool")
    axis.set_ylabel("hit rate, % of tokens in full prompt blocks")
    axis.set_ylim(bottom=0)
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
    figure.tight_layout()
    png = io.BytesIO()
    figure.savefig(png, dpi=150, format="png")
    pyplot.close(figure)
    return png.getvalue()
