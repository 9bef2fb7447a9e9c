"""RMS normalisation with a gate before it, as in Mamba-2, or after it, as in gated delta nets."""
