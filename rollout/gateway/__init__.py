"""Users' programs as teams: their OpenAI- or Anthropic-style calls become agents' turns with exact tokens."""
