// The rank that is pointed at: every drawing of a view that has it marks it.

/** `now()`: the rank, or null. `at(rank)`: it is pointed at. `watch(f)`: call f when it changes. */
export function pointing() {
  const watchers = new Set();
  let rank = null;
  return {
    now: () => rank,
    at: (other) => {
      if (other === rank) return;
      rank = other;
      watchers.forEach((f) => f());
    },
    watch: (f) => watchers.add(f),
  };
}
