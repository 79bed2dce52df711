"""`marsrl sft`: teach policies to imitate recorded answers."""
