"""Profile, geometry and routing statistics in, plan out. Pure: nothing here measures, reads or waits."""
