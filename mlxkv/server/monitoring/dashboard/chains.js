// From the rows of /v1/cache/blocks to cells on a grid: chains side by side, a common beginning drawn once.
// Nothing here touches the page.

const TREE_GAP = 1; // columns between trees that stand side by side
const ROW_GAP = 0.5; // rows between trees that stand below each other

// One tree for each first block of a root. A node has its row, parent, children, place in its chain (0 first), the
// checkpoint that ends with it, and how many blocks lie below it.
// `order` (name -> number) remembers in which order names were seen first, so that a cell does not move when used.
export function grow(answer, order) {
  const nodes = new Map();
  const checkpoints = [];
  for (const row of answer.blocks) {
    if (!order.has(row.block)) order.set(row.block, order.size);
    const node = { row, parent: null, children: [], place: 0, checkpoint: null, below: 0, root: row.parent };
    if (row.kind === "checkpoint") checkpoints.push(node);
    else nodes.set(row.block, node);
  }
  for (const mark of checkpoints) {
    const block = nodes.get(mark.row.parent);
    if (block) block.checkpoint = mark.row;
    else nodes.set(mark.row.block, mark); // a model without attention holds nothing but states
  }
  const firsts = [];
  for (const node of nodes.values()) {
    node.parent = nodes.get(node.row.parent) ?? null;
    if (node.parent) node.parent.children.push(node);
    else firsts.push(node);
  }
  const walk = [...firsts];
  for (let i = 0; i < walk.length; i++) {
    for (const child of walk[i].children) {
      child.place = walk[i].place + 1;
      child.root = walk[i].root;
      walk.push(child);
    }
  }
  for (let i = walk.length - 1; i > 0; i--) {
    if (walk[i].parent) walk[i].parent.below += walk[i].below + 1;
  }
  const bySight = (a, b) => order.get(a.row.block) - order.get(b.row.block);
  for (const node of walk) node.children.sort((a, b) => b.below - a.below || bySight(a, b));
  firsts.sort(bySight);
  const roots = new Map();
  if (firsts.some((first) => first.root === answer.root)) roots.set(answer.root, []); // this server's own comes first
  for (const first of firsts) {
    if (!roots.has(first.root)) roots.set(first.root, []);
    roots.get(first.root).push(first);
  }
  return { nodes, roots, checkpoints: checkpoints.length };
}

// Cells of one tree from its own top left: the longest continuation stays on the row, every other one starts a row
// below its parent. A run that is wider than the grid goes on at the left of the next row.
function place(first, columns) {
  const cells = [];
  const waiting = [{ node: first, column: 0 }];
  let rows = 0;
  let width = 0;
  while (waiting.length) {
    let { node, column } = waiting.pop();
    let row = rows++;
    while (node) {
      if (column >= columns) {
        column = 0;
        row = rows++;
      }
      cells.push({ node, x: column, y: row });
      width = Math.max(width, ++column);
      for (let i = node.children.length - 1; i > 0; i--) waiting.push({ node: node.children[i], column });
      node = node.children[0];
    }
  }
  return { cells, rows, width };
}

// Trees of one root, packed: each goes where it is highest, then leftmost. Units are columns and rows.
export function pack(firsts, columns) {
  const filled = new Array(columns).fill(0);
  const cells = [];
  for (const first of firsts) {
    const tree = place(first, columns);
    let best = { x: 0, y: Infinity };
    for (let x = 0; x + tree.width <= columns && best.y > 0; x++) {
      let y = 0;
      for (let i = x; i < x + tree.width && y < best.y; i++) y = Math.max(y, filled[i]);
      if (y < best.y) best = { x, y };
    }
    const end = Math.min(best.x + tree.width + TREE_GAP, columns);
    for (let i = best.x; i < end; i++) filled[i] = Math.max(filled[i], best.y + tree.rows + ROW_GAP);
    for (const cell of tree.cells) cells.push({ node: cell.node, x: best.x + cell.x, y: best.y + cell.y });
  }
  return { cells, rows: Math.max(0, ...filled) };
}
