"""What a process needs of its own: threads that work in the background, and forks that are safe."""
