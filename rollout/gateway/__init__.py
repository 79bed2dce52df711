"""Users' programs as teams: their calls by OpenAI's and Anthropic's protocols become agents' turns with exact tokens."""
