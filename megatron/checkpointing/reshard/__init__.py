"""Loading a checkpoint onto another TP x PP x DP layout than it was saved on."""
