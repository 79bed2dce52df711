"""Transfer of the trainer's weights to every engine, and its verification."""
