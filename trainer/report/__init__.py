"""Output of a run: metrics, samples, trace, summary, console and report."""
