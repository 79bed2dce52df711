"""What teams are taught before RL, where their policies start from random weights."""
