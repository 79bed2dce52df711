"""Programs of others play: their calls by OpenAI's and Anthropic's protocols are agents', with the tokens that were sampled."""
