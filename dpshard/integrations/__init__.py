"""dpshard in the frameworks and under the interfaces that people come from; each is imported by its own name."""
