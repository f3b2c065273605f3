"""Engine `datastates`: DataStates-LLM."""
