// Keeps the new turns of a conversation. Knows nothing of the page.

import { turnOf } from "./conversation.js";

/**
 * Keep what is not kept yet.
 *
 * @param {object} store See store.js.
 * @param {import("./conversation.js").Conversation} talk Changed: its keys, title and time.
 * @param {object | null} running The answer under way, which is left out.
 * @param {string} system The system prompt.
 * @returns {Promise<{kept: boolean, deleted: boolean, others: boolean}>} Whether there was something to keep;
 *   whether the conversation was deleted by others, so that it goes on as a new one with its new turns; and
 *   whether others have added turns, which are not in `talk`.
 */
export async function keepTurns(store, talk, running, system) {
  const pairs = talk.unsaved(running);
  if (!pairs.length) return { kept: false, deleted: false, others: false };
  const change = changeOf(talk, pairs, system);
  const known = [...talk.turnIds, ...talk.undone];
  let kept;
  let deleted = false;
  try {
    kept = await store.keep(talk.id, change);
  } catch (error) {
    if (error.code !== "conversation_not_found" || talk.id === null) throw error;
    deleted = true;
    kept = await store.keep(null, { turns: change.turns, system });
  }
  pairs.forEach((pair, at) => {
    for (const message of pair) message.turn = kept.added_ids[at];
  });
  talk.dropped = talk.dropped.filter(({ turn }) => !change.undone.includes(turn));
  known.push(...kept.added_ids);
  Object.assign(talk, { id: kept.id, title: kept.title, updated: kept.updated, system });
  return { kept: true, deleted, others: kept.turn_ids.some((turn) => !known.includes(turn)) };
}

/**
 * Keep what there is at once, because the page closes: nothing that waits would still happen.
 *
 * @param {object} store See store.js.
 * @param {import("./conversation.js").Conversation} talk Its turns count as kept from now on.
 * @param {string} system The system prompt.
 */
export function keepLeaving(store, talk, system) {
  const pairs = talk.unsaved(null);
  if (!pairs.length) return;
  store.keep(talk.id, changeOf(talk, pairs, system)).catch(() => {});
  for (const message of pairs.flat()) message.turn = 0;
}

function changeOf(talk, pairs, system) {
  const change = { turns: pairs.map(turnOf), undone: talk.undone };
  // One that is unchanged here does not replace a change by others.
  if (system !== talk.system) change.system = system;
  return change;
}
