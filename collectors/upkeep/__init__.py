"""What keeps a store small and whole: compaction, retention, verification."""
