"""Who is asked when: in stages, event by event, beside the trainer; and the books of what is under way."""
