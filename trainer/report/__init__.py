"""What a run says: metrics, samples, trace, summary, console and report."""
